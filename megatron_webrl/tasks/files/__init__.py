"""Tasks from files: formats, rows, the index of a file by byte offset, and the source that draws from it."""
