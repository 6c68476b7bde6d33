"""Side-by-side measurements of Menagerie and its peers."""
