"""What vision-language models share: vision tower, packed text model, attention, experts."""
