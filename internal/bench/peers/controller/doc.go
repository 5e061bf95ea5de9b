// Package controller has benchmarks of the climb of a cluster's nodes as a
// controller-runtime controller does it. They build only with the tag peers,
// because all of controller-runtime takes minutes.
package controller
