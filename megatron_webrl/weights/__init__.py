"""Weight transfer from trainer ranks to engine ranks."""
