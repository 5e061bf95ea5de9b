// Package histories lets many goroutines use an executor or a driver at once,
// writes down who asked for what and when, and looks for an order in which one
// goroutine could have seen the same (porcupine). It is a module of its own
// because nothing else needs that package.
package histories
