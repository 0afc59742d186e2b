"""View data to markup. Every text from a log is escaped here; requests are named by their place in
the order of arrival, so the script of the page only ever sees numbers."""
