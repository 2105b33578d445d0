"""What a run left in its directory, for people: reading it, and showing it in the terminal."""
