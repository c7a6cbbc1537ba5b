"""The policies: what to try next. Pure functions of the journal's state."""
