"""Check the source of GPU packages, without running it, for what this project and megatron-core use of them."""
