"""Models that no single machine holds: stages in a row, each with interchangeable servers."""
