"""The methods: one file each, found by its name. Methods never import each other: what several
share is in `base`. May import everything up to client."""
