"""What lasts of a run? Its format, and its files; knows no DeepSpeed."""
