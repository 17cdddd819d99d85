"""Is a parallel training equal to one device? If not, where does it differ, and why?"""
