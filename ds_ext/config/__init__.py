"""What may a DeepSpeed config contain? Its settings are parsed and validated here."""
