"""What a user reads: `explain` in text and pictures, units of bytes, FLOPs and seconds."""
