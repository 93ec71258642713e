"""Feeds: how samples reach the device, from wherever their bytes live."""
