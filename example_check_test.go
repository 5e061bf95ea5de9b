package provisioning_test

import (
	"fmt"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// Does my backend keep the rules? The kit makes a fresh subject for each case.
func Example_conformance() {
	err := fakebackend.Check(func() fakebackend.Subject {
		backend := fakebackend.New(fakebackend.Config{}) // yours, in earnest
		return fakebackend.Subject{
			Backend: backend,
			// How many machines the provider really has for a key, and how
			// its time is moved on. Cases that need either are left out
			// where it is nil.
			Live:    func(key provisioning.ExternalKey) (int, error) { return backend.LiveKey(key), nil },
			Advance: func(d time.Duration) { backend.AdvanceTo(backend.Now().Add(d)) },
		}
	})
	fmt.Println(err)

	// Output:
	// <nil>
}
