"""The bytes."""
