"""One typed experiment from YAML layers and overrides."""
