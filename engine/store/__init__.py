"""The expert store on disk: its layout, the writer that prepares it, the reader that streams it, checkpoint sources."""
