"""What is installed, and whether weights arrive."""
