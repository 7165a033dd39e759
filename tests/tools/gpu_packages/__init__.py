"""The check of GPU packages."""
