"""The sweep command, its trials and its report."""
