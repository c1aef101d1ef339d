"""Plugins that are each broken in their own way."""
