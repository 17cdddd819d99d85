"""`python -m minipar` is `minipar`; for `torchrun --nproc-per-node 4 -m minipar train`."""

from minipar.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
