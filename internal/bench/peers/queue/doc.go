// Package queue has benchmarks of the work queues that controllers are built
// on. It is a package of its own because it is quick to build.
package queue
