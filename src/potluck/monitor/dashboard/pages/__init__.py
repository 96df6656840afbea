"""A file per page. Each has a function that fills the frame, called once for each visitor."""
