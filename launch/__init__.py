"""Demo checkpoints, prompts and servers: everything `make demo` and the tests start from."""
