package scenario

import (
	"strconv"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// config is what a config line may change.
type config struct {
	retry       provisioning.RetryPolicy
	maxInFlight int
	class       fakebackend.Class
	lag, settle time.Duration
	manualBoot  bool
	manualDrive bool
}

func defaults() config {
	return config{retry: provisioning.RetryPolicy{
		InitialDelay: time.Second, MaxDelay: 60 * time.Second, OperationTimeout: 30 * time.Second,
		EndpointProbeInterval: 5 * time.Second, EndpointTimeout: 10 * time.Minute, BootstrapTimeout: 20 * time.Minute,
		StableAfter: 10 * time.Minute, CancelLimit: 5,
	}}
}

func parseConfig(words []string) (config, error) {
	c := defaults()
	for _, word := range words {
		key, value, err := parseAssignment(word)
		if err != nil {
			return c, err
		}
		if err := c.set(key, value); err != nil {
			return c, err
		}
	}
	if err := c.retry.Validate(); err != nil {
		return c, wrong("a valid retry policy", err.Error())
	}
	return c, nil
}

func (c *config) set(key, value string) (err error) {
	policy := func(field *time.Duration) error {
		if *field, err = parseDuration(value); err == nil && *field == 0 {
			return wrong("a duration that is not 0, which would mean the library's default", quoted(value))
		}
		return err
	}
	provider := func(field *time.Duration) error {
		if *field, err = parseDuration(value); err == nil && *field < 0 {
			return wrong("a duration that is not negative", quoted(value))
		}
		return err
	}
	oneOf := func(first, second string) (isSecond bool, err error) {
		if value != first && value != second {
			return false, wrong(first+" or "+second, quoted(value))
		}
		return value == second, nil
	}
	switch key {
	case "initial":
		return policy(&c.retry.InitialDelay)
	case "max":
		return policy(&c.retry.MaxDelay)
	case "jitter":
		if c.retry.Jitter, err = strconv.ParseFloat(value, 64); err != nil {
			return wrong("a fraction, like 0.5", quoted(value))
		}
		return nil
	case "timeout":
		return policy(&c.retry.OperationTimeout)
	case "probe":
		return policy(&c.retry.EndpointProbeInterval)
	case "endpoint-timeout":
		return policy(&c.retry.EndpointTimeout)
	case "bootstrap-timeout":
		return policy(&c.retry.BootstrapTimeout)
	case "stable-after":
		return policy(&c.retry.StableAfter)
	case "cancel-limit":
		if c.retry.CancelLimit, err = parseCount(value); err == nil && c.retry.CancelLimit == 0 {
			return wrong("a limit that is not 0, which would mean the library's default", quoted(value))
		}
		return err
	case "max-in-flight":
		c.maxInFlight, err = parseCount(value)
		return err
	case "class":
		if c.class, err = fakebackend.ParseClass(value); err != nil {
			return wrong("token, name or label", quoted(value))
		}
		return nil
	case "lag":
		return provider(&c.lag)
	case "settle":
		return provider(&c.settle)
	case "bootstrap":
		c.manualBoot, err = oneOf("auto", "manual")
		return err
	case "drive":
		c.manualDrive, err = oneOf("auto", "manual")
		return err
	}
	return wrong("a configuration key", quoted(key))
}
