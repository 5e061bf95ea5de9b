package main

import (
	"math"
	"slices"
)

// median of an even number is the mean of the two in the middle; of none it is
// not a number.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	values = slices.Sorted(slices.Values(values))
	middle := len(values) / 2
	if len(values)%2 == 1 {
		return values[middle]
	}
	return (values[middle-1] + values[middle]) / 2
}

// exponent fits y = c·x^e by least squares over the logarithms and returns e.
// It needs two different x, and positive numbers.
func exponent(x, y []float64) float64 {
	if len(x) < 2 {
		return math.NaN()
	}
	var meanX, meanY float64
	for i := range x {
		meanX += math.Log(x[i]) / float64(len(x))
		meanY += math.Log(y[i]) / float64(len(x))
	}
	var covariance, variance float64
	for i := range x {
		dx := math.Log(x[i]) - meanX
		covariance += dx * (math.Log(y[i]) - meanY)
		variance += dx * dx
	}
	return covariance / variance
}

// rounds is what all rounds have measured.
type rounds []round

// each returns what of computes for every round that has measured all the
// points.
func (rs rounds) each(of func(value func(subject string, n int, unit string) float64) float64) []float64 {
	var all []float64
	for _, r := range rs {
		known := true
		v := of(func(subject string, n int, unit string) float64 {
			value, ok := r[point{subject, n}][unit]
			known = known && ok
			return value
		})
		if known {
			all = append(all, v)
		}
	}
	return all
}

// value is the median of a figure.
func (rs rounds) value(subject string, n int, unit string) float64 {
	return median(rs.each(func(value func(string, int, string) float64) float64 { return value(subject, n, unit) }))
}

// ratio is the median of how many times a costs what b costs in the same round.
func (rs rounds) ratio(a, b string, n int, unit string) float64 {
	return median(rs.each(func(value func(string, int, string) float64) float64 { return value(a, n, unit) / value(b, n, unit) }))
}

// growth is the median exponent of a figure over the sizes.
func (rs rounds) growth(subject string, sizes []int, unit string) float64 {
	return median(rs.each(func(value func(string, int, string) float64) float64 {
		var x, y []float64
		for _, n := range sizes {
			x, y = append(x, float64(n)), append(y, value(subject, n, unit))
		}
		return exponent(x, y)
	}))
}
