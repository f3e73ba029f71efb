"""Workers on Ray: deployments, worker groups, core allocation, fault policy."""
