"""Trust in training: parity with one device, and the reasons of a hang, for code of any project."""
