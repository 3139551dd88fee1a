"""Parameters as frozen dataclasses: the sections of a setting (schema), checked reading (decode),
files, profiles and grids (params). May import core."""
