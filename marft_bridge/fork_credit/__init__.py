"""What each call contributes: recorded runs, forked before and after it and with a stand-in -> shares, differences."""
