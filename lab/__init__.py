"""What a person sees: the `brokerlab` command."""
