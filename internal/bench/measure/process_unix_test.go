//go:build unix

package measure

import (
	"runtime"
	"testing"
)

// TestProcess: what is used shows.
func TestProcess(t *testing.T) {
	start, heap := CPUTime(), Heap()
	block := make([]byte, 64<<20)
	for i := 0; CPUTime() == start; i++ {
		block[i%len(block)]++
	}
	for i := 0; i < len(block); i += 512 {
		block[i]++
	}
	if grown := Heap() - heap; grown < 63<<20 || grown > 80<<20 {
		t.Errorf("the heap grew by %d bytes for a block of %d", grown, len(block))
	}
	if peak := PeakRSS(); peak < int64(len(block)) || peak > 16<<30 {
		t.Errorf("peak of %d bytes with a block of %d", peak, len(block))
	}
	runtime.KeepAlive(block)
}
