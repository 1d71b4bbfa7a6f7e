"""The commands of ``kvasir-peer``, one a file; each is imported only when it is called."""
