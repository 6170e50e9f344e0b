"""No contests: the losses of routers are made of other families' functions, whose contests are in those families'
files, and a router has few experts."""
