"""Trust: parity, divergence and hangs of anybody's training."""
