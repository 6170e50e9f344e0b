"""Losses of orders: preferences between two answers, ranked lists, ordered classes and times of events."""
