"""What may a DeepSpeed config ask for? Settings read, checked and refused by name."""
