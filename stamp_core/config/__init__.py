"""Parameters as frozen dataclasses: a schema, checked reading, files and profiles."""
