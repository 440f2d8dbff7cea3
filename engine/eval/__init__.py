"""Quality is measured on the path that generates: every scored token goes through a decode forward, in any mode."""
