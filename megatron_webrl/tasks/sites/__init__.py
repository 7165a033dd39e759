"""Five small self-made web sites, their content and tasks generated from a seed."""
