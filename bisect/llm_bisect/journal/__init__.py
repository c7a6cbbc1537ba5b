"""The journal: the only truth of a study. Events, the store, and the fold to a study's state."""
