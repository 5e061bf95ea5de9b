package provisioning

func ftPolicy() *RetryPolicy {
	p := RetryPolicy{}.withDefaults()
	return &p
}
