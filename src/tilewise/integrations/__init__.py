"""tilewise inside other libraries. Each module imports its library when it is used, never before."""
