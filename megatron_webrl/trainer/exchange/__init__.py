"""What trainer ranks on several nodes tell each other about records and images."""
