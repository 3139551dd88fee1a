"""What several methods of the workbench share."""
