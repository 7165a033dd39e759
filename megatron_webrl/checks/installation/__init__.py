"""`webrl doctor`: checks of the installation and of the weight sync."""
