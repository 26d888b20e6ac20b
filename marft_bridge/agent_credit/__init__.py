"""What each agent contributes to its team: teams with some agents replaced -> shares per agent."""
