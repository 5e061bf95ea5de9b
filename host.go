package provisioning

import (
	"context"
	"time"
)

// Clock is where a [Host] reads the time and how it sleeps. The default is the
// machine's monotonic clock; a test or a simulation brings its own.
type Clock interface {
	// Now returns the present instant. Only differences matter.
	Now() time.Time
	// Sleep returns once Now has reached until (the zero time: never for
	// that reason), wake holds a value, which Sleep takes, or ctx is done.
	Sleep(ctx context.Context, until time.Time, wake <-chan struct{})
}
