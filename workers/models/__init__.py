"""One composable decoder for every supported family, and the tensors it works on."""
