"""Requests and their scheduling."""
