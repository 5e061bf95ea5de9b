//go:build unix

package measure

import (
	"runtime"
	"syscall"
	"time"
)

// CPUTime is what this process has used so far, user and system, on all its
// threads. The machines that benchmarks run on are shared, so they count it and
// not the time on the wall.
func CPUTime() time.Duration {
	u := usage()
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// PeakRSS is the most memory, in bytes, that this process has had resident.
func PeakRSS() int64 {
	peak := int64(usage().Maxrss)
	if runtime.GOOS == "darwin" || runtime.GOOS == "ios" {
		return peak // in bytes there, in kilobytes elsewhere
	}
	return peak * 1024
}

// Heap is the live heap in bytes, after two collections: the first only moves
// what sync.Pool holds to where the second finds it.
func Heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func usage() syscall.Rusage {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return u
}
