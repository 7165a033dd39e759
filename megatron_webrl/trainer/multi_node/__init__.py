"""Exchange of records and images between trainer ranks, on one node or several."""
